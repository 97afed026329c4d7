"""A board trains in LiteRT or an older TensorFlow: the folder for it, `--export board`."""
