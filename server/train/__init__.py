"""`dspark-train`: what of training needs the engine (answers of the target, acceptance of a draft), and the CLI."""
