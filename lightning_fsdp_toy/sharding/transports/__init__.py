"""How bytes move between ranks: one class for each way (see ``collectives.Transport``)."""
