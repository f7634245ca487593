"""`report.html`: runs, plans, comparisons and verify results as pages."""
