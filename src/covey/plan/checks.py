def checks(): pass
