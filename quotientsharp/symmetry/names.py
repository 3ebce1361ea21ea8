from __future__ import annotations
def propose_by_name(model):
    return [], []
