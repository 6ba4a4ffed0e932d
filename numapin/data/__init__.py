"""The in-rank data path: a DataLoader whose workers write into memory that the rank has pinned near its GPU."""
