package mesh

// faultPoint is called between the steps of a delivery, where a process may end. Only tests that
// end it there set it, before anything runs.
var faultPoint func(name string)

func fault(name string) {
	if faultPoint != nil {
		faultPoint(name)
	}
}
