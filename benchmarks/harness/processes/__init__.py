"""Other libraries, and the engines under test, in processes of their own."""
