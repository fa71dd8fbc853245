"""One file a check (tests.gpu.check). They import torch and everything heavy inside functions only."""
