"""TRL's experimental names that covey has."""
