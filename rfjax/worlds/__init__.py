"""Small procedural worlds: exact video for any prompt, to train on and to judge by."""
