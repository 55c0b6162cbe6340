"""What the starter policy of Atlas, and the study's variants of it, are trained on."""
