"""How a model of transformers sees images: its vision tower, and the pixels that it is given."""
