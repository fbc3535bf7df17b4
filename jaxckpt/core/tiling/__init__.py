"""Tiles: how an axis passes through a program, and the program that runs tile by tile.

`shares.py` says what a tile has of a value. `axes.py`, `gathers.py` and `nested.py` have the rules, one for each
primitive. `follow.py` follows the axis through a program and evaluates one tile. `divide.py` divides a program into
what runs before, in and after the tiles. `loop.py` is the loop over tiles, with its derivatives.
"""
