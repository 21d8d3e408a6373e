"""What is said to people: sentences as data, a table of them for each language. No torch, no NumPy."""
