"""The parts of the documentation site that Sphinx does not have: navigation, links, generated pages, Markdown twins."""
