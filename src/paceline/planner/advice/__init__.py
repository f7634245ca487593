"""Write the text of a plan: recommendations, explanations, differences between plans."""
