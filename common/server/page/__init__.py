"""The web page at `/`: conversations with the model beside the engine's steps, as the viewer draws them.

Begin with `page`, which puts the scripts of `chat_page/` and `viewer/` together. `live_view` sends the running
engine's steps to the page.
"""
