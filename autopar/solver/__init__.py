"""The pairwise choice problem: presolve, dual ascent, integer programs, memory prices. Imports nothing of autopar."""
