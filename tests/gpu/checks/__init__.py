"""One file a check (tests.gpu.harness.Check). They import torch and everything heavy inside functions only."""
