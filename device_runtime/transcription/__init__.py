"""Speech to text: windows of audio to segments of text, by a speech model's engine."""
