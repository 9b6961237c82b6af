"""A folder that carries the proof on a GPU to a board without network, torch or compiler."""
