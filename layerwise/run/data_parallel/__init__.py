"""Plans that split samples only: the model runs as the user wrote it."""
