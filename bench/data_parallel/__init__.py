"""The bench `data_parallel`: all-reduces, servers, PipeDream and compressed gradients, counted and compared."""
