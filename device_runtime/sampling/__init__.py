"""What chooses tokens: temperature and its kin, penalties, guided decoding, log-probabilities."""
