package mesh

// SetFaultPoint is for processes that a test kills in the middle of a delivery.
func SetFaultPoint(fn func(name string)) { faultPoint = fn }
