package natsd

import "testing"

func TestSyncAlways(t *testing.T) {
	for _, test := range []struct {
		config     string
		sync, want bool
	}{
		{"", false, false},
		{"", true, true},
		{"jetstream { sync_interval: 10s }", true, true},
		{"jetstream { sync_interval: always }", false, true},
	} {
		s, err := Start(Config{StoreDir: t.TempDir(), DontListen: true, SyncAlways: test.sync, ConfigText: []byte(test.config)})
		if err != nil {
			t.Fatal(err)
		}
		if got := s.srv.JetStreamConfig().SyncAlways; got != test.want {
			t.Errorf("config %q and SyncAlways %t: %t, want %t", test.config, test.sync, got, test.want)
		}
		if err := s.Stop(); err != nil {
			t.Fatal(err)
		}
	}
}
