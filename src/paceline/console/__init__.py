"""What a command prints, and how numbers and lists are formatted."""
