"""Tests of shared data in one process."""
