"""What is done with a trained model: sampling text, and measuring how well it predicts."""
