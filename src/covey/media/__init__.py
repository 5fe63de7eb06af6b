"""Images of rows: where they are, their pixels, and the patches that a vision language model is given."""
