"""What a bench and a check stand on: the runner, ranks, timing, tables, pictures. No subject of theirs."""
