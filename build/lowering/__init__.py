"""Lowering passes of portable graphs that backends share."""
