"""What a plan says to its reader: recommendations, explanations, differences between plans."""
