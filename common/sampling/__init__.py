"""From logits to tokens, for all rows of a pass at once.

Begin with `draw`: `choose` applies masks, penalties, temperature and filters, and draws with one random number
of each row's own request. `inputs` collects the requests' parameters as tensors.
"""
