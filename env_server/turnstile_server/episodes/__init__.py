"""Episodes: their keys, their life, what is stored of them, what is given out."""
