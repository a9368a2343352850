"""The names of files of weights and checkpoints."""

WEIGHTS_NAME = "pytorch_model.bin"
SAFE_WEIGHTS_NAME = "model.safetensors"
SCALER_NAME = "scaler.pt"
