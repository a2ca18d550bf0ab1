"""SGLang's platform for machines without a GPU."""


def activate():
    return None
