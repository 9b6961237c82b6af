"""Steps of the proof, as a board runs them: `python -m edgellm.scripts.proof_folder.steps`."""
