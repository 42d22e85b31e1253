"""The serving side of dspark: the engine, its HTTP interface and the command `dspark-serve`."""
