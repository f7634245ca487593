"""Failure diagnosis: finds which rank failed first, which rank hangs and where, and whether memory ran out."""
