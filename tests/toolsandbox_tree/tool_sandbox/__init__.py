print("a library that prints when imported")
