"""What a person wrote, as nouns: models, clusters, jobs, plans. Every error is one line with the place, the numbers and
the way out."""
