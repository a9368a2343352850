"""Steps that are recorded as lanes of spans: what each device computes, and each of gloo's threads sends."""
