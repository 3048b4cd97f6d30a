package mesh_test

func maybeHandlerMain() {}
