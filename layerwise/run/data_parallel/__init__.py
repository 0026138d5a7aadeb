"""The model as the user wrote it, where a plan splits nothing but samples: the module itself is called."""
