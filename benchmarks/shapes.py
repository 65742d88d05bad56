"""Shapes of the real model and of one rank's micro-step, in the letters of `model/config.py`."""

# Nemotron-3.5-Lightning-30B-A3B
T = 16_384  # tokens of a micro-step
D = 2_688  # hidden size
V = 131_072  # vocabulary
E = 128  # experts
K = 6  # of them a token
F = 1_856  # intermediate size of an expert
F_SHARED = 3_712  # of the shared expert
H = 64  # Mamba heads
P = 64  # width of a Mamba head
G = 8  # groups that share b and c
N = 128  # states
W = 4  # taps of the convolution
CONV = H * P + 2 * G * N  # channels of the convolution
PROJECTED = H * P + CONV + H  # z | x, b, c | dt
DOCUMENTS = (5_000, 3, 1, 2, 4_097, 128, 1, 3_000, 127, 4_025)  # of a packed row
