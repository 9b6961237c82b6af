"""What backends share when they turn portable graphs into their own."""
