"""Stand-ins for the parts of ms-swift that its schedulers and gym environments are written against."""
