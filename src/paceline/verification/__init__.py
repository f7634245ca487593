"""`paceline verify`: does a layout give the training of one process?"""
