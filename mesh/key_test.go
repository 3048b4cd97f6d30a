package mesh_test

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"jetmesh/mesh"
)

var key128 = strings.Repeat("k", 128)

func TestPlainKeyKeepsEveryLegalCharacterAndItsCase(t *testing.T) {
	for _, key := range []string{
		"a", "-", ":", "PO-100", "mall:order:pay:ORDER-100@x", "a.b_c@d:e/f-0", key128,
		"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._@:/-",
	} {
		if err := mesh.ValidateKey(key); err != nil {
			t.Errorf("ValidateKey(%q) = %v", key, err)
		}
		for _, s := range []string{key, " " + key, key + "\r\n", "\t\u00a0" + key + "\u3000 "} {
			if got, err := mesh.NormalizeKey(s); err != nil || got != key {
				t.Errorf("NormalizeKey(%q) = %q, %v, want %q", s, got, err, key)
			}
		}
	}
}

func TestBadPlainKeyIsANamedError(t *testing.T) {
	const allowed = `; allowed are ASCII letters, digits and any of "._@/-:"`
	for _, c := range []struct{ key, want string }{
		{"", `mesh: idempotency key "" is empty`},
		{key128 + "k", `mesh: idempotency key "` + key128 + `"… is 129 characters long, allowed are 128`},
		{"a b", `mesh: idempotency key "a b" holds U+0020 ' '` + allowed},
		{"a\x00", `mesh: idempotency key "a\x00" holds U+0000` + allowed},
		{"a\nb", `mesh: idempotency key "a\nb" holds U+000A` + allowed},
		{"a\x7f", `mesh: idempotency key "a\x7f" holds U+007F` + allowed},
		{"a\x1b[31m", `mesh: idempotency key "a\x1b[31m" holds U+001B` + allowed},
		{"a\xff", `mesh: idempotency key "a\xff" holds byte 0xff, which is not UTF-8` + allowed},
		{"\xd0", `mesh: idempotency key "\xd0" holds byte 0xd0, which is not UTF-8` + allowed},
		{"a\ufffd", `mesh: idempotency key "a` + "\ufffd" + `" holds U+FFFD '` + "\ufffd" + `'` + allowed},
		{"p\u0430y", `mesh: idempotency key "p` + "\u0430" + `y" holds U+0430 '` + "\u0430" + `'` + allowed}, // Cyrillic
		{"\uff41", `mesh: idempotency key "` + "\uff41" + `" holds U+FF41 '` + "\uff41" + `'` + allowed},     // full width
		{"a\u0661", `mesh: idempotency key "a` + "\u0661" + `" holds U+0661 '` + "\u0661" + `'` + allowed},   // Arabic digit
		{"a\u202eb", `mesh: idempotency key "a\u202eb" holds U+202E` + allowed},
		{"a\u200b", `mesh: idempotency key "a\u200b" holds U+200B` + allowed},
		{"a+b", `mesh: idempotency key "a+b" holds U+002B '+'` + allowed},
		{`a"b`, `mesh: idempotency key "a\"b" holds U+0022 '"'` + allowed},
		{"a*", `mesh: idempotency key "a*" holds U+002A '*'` + allowed},
	} {
		wantKeyError(t, mesh.ValidateKey(c.key), c.key, "key", c.want)
		got, err := mesh.NormalizeKey(c.key + " ")
		if got != "" {
			t.Errorf("NormalizeKey(%q) = %q beside its error", c.key, got)
		}
		wantKeyError(t, err, c.key, "key", c.want)
	}
}

func TestKeyErrorIsShortAndPrintableWhateverTheKey(t *testing.T) {
	for _, key := range []string{
		strings.Repeat("\x00", 1<<20), strings.Repeat("\xff", 1<<20), strings.Repeat("k", 1<<20),
		strings.Repeat("A-", 1<<19) + ":b:c:d", strings.Repeat(":", 1<<20), strings.Repeat("\U000e0001", 1<<18),
	} {
		_, parse := mesh.ParseScopedKey(key)
		_, build := mesh.NewScopedKey(key, key, key, key)
		for _, err := range []error{mesh.ValidateKey(key), parse, build} {
			checkKeyError(t, err)
		}
	}
}

func TestScopedKeyIsBuiltInKebabCase(t *testing.T) {
	for _, c := range []struct {
		parts [4]string
		want  string
	}{
		{[4]string{"Open Platform", "Package Order", "Pay", "PO-100"}, "open-platform:package-order:pay:PO-100"},
		{[4]string{"mall", "order", "pay", "Order_1.x@Y/z-"}, "mall:order:pay:Order_1.x@Y/z-"},
		{[4]string{"HTTPServer", "snake_case", "__markPaid--", "-"}, "http-server:snake-case:mark-paid:-"},
		{[4]string{"1", "v2", "order2Pay", "0"}, "1:v2:order2-pay:0"},
		{[4]string{"a", "b", "c", key128[:122]}, "a:b:c:" + key128[:122]},
	} {
		k, err := mesh.NewScopedKey(c.parts[0], c.parts[1], c.parts[2], c.parts[3])
		if err != nil || k.String() != c.want {
			t.Errorf("NewScopedKey(%q) = %q, %v, want %q", c.parts, k, err, c.want)
		}
		if back, err := mesh.ParseScopedKey(c.want); err != nil || back != k {
			t.Errorf("ParseScopedKey(%q) = %#v, %v, want %#v", c.want, back, err, k)
		}
	}
}

func TestBadPartOfANewScopedKeyIsNamed(t *testing.T) {
	const names = `; allowed are ASCII letters, digits and any of " _-./\t"`
	for _, c := range []struct {
		parts      [4]string
		part, want string
	}{
		{[4]string{"", "b", "c", "d"}, "consumer", `mesh: idempotency key ":b:c:d": part consumer is empty`},
		{[4]string{"a", "", "c", "d"}, "resource", `mesh: idempotency key "a::c:d": part resource is empty`},
		{[4]string{"a", "b", "", "d"}, "action", `mesh: idempotency key "a:b::d": part action is empty`},
		{[4]string{"a", "b", "c", ""}, "businessId", `mesh: idempotency key "a:b:c:": part businessId is empty`},
		{[4]string{"a", " -_", "c", "d"}, "resource", `mesh: idempotency key "a: -_:c:d": part resource has no letter or digit`},
		{[4]string{"a", "b", "c", "d:e"}, "businessId", `mesh: idempotency key "a:b:c:d:e": part businessId holds U+003A ':'; allowed are ASCII letters, digits and any of "._@/-"`},
		{[4]string{"a", "b", "c", "d e"}, "businessId", `mesh: idempotency key "a:b:c:d e": part businessId holds U+0020 ' '; allowed are ASCII letters, digits and any of "._@/-"`},
		{[4]string{"a:x", "b", "c", "d"}, "consumer", `mesh: idempotency key "a:x:b:c:d": part consumer holds U+003A ':'` + names},
		{[4]string{"a", "b@", "c", "d"}, "resource", `mesh: idempotency key "a:b@:c:d": part resource holds U+0040 '@'` + names},
		{[4]string{"a", "b", "Payé", "d"}, "action", `mesh: idempotency key "a:b:Payé:d": part action holds U+00E9 'é'` + names},
		{[4]string{"a", "b", "pay\n", "d"}, "action", `mesh: idempotency key "a:b:pay\n:d": part action holds U+000A` + names},
		{[4]string{"a", "b", "\xc3", "d"}, "action", `mesh: idempotency key "a:b:\xc3:d": part action holds byte 0xc3, which is not UTF-8` + names},
		{[4]string{"a", "b", "\u212a", "d"}, "action", `mesh: idempotency key "a:b:` + "\u212a" + `:d": part action holds U+212A '` + "\u212a" + `'` + names}, // Kelvin sign, lower case is k
	} {
		k, err := mesh.NewScopedKey(c.parts[0], c.parts[1], c.parts[2], c.parts[3])
		if k != (mesh.ScopedKey{}) {
			t.Errorf("NewScopedKey(%q) = %#v beside its error", c.parts, k)
		}
		wantKeyError(t, err, strings.Join(c.parts[:], ":"), c.part, c.want)
	}

	// The length that counts is the converted one: 124 characters given, 129 stored.
	_, err := mesh.NewScopedKey("aBcDeFg", "hI", "jK", key128[:110])
	long := "a-bc-de-fg:h-i:j-k:" + key128[:110]
	wantKeyError(t, err, long, "key", `mesh: idempotency key "`+long[:128]+`"… is 129 characters long, allowed are 128`)
}

func TestParseRefusesWhatIsNotCanonical(t *testing.T) {
	for _, c := range []struct{ key, part, reason string }{
		{"", "key", "has 1 part(s), wanted are the 4 of consumer:resource:action:businessId"},
		{"a:b:c", "key", "has 3 part(s), wanted are the 4 of consumer:resource:action:businessId"},
		{"a:b:c:d:e", "key", "has 5 part(s), wanted are the 4 of consumer:resource:action:businessId"},
		{":b:c:d", "consumer", "is empty"},
		{"a::c:d", "resource", "is empty"},
		{"a:b::d", "action", "is empty"},
		{"a:b:c:", "businessId", "is empty"},
		{"A:b:c:d", "consumer", `is not in kebab-case, that is "a"`},
		{"a:packageOrder:c:d", "resource", `is not in kebab-case, that is "package-order"`},
		{"a:b:mark_paid:d", "action", `is not in kebab-case, that is "mark-paid"`},
		{"a:b:-c:d", "action", `is not in kebab-case, that is "c"`},
		{"a:b:c--d:d", "action", `is not in kebab-case, that is "c-d"`},
		{"a:b:-:d", "action", "has no letter or digit"},
		{" a:b:c:d", "consumer", `is not in kebab-case, that is "a"`},
		{"a:b:c:d ", "businessId", `holds U+0020 ' '; allowed are ASCII letters, digits and any of "._@/-"`},
		{"a:b:c:d\x00", "businessId", `holds U+0000; allowed are ASCII letters, digits and any of "._@/-"`},
		{"a:b:c:" + key128[:123], "key", "is 129 characters long, allowed are 128"},
	} {
		k, err := mesh.ParseScopedKey(c.key)
		if k != (mesh.ScopedKey{}) {
			t.Errorf("ParseScopedKey(%q) = %#v beside its error", c.key, k)
		}
		var ke *mesh.KeyError
		if !errors.As(err, &ke) || *ke != (mesh.KeyError{Key: c.key, Part: c.part, Reason: c.reason}) {
			t.Errorf("ParseScopedKey(%q) = %#v, want part %s, reason %s", c.key, err, c.part, c.reason)
		}
	}
}

func TestKebab(t *testing.T) {
	for in, want := range map[string]string{
		"":                     "",
		"Open Platform":        "open-platform",
		"Pay":                  "pay",
		"camelCase":            "camel-case",
		"HTTPServer":           "http-server",
		"userID":               "user-id",
		"myHTTPServerID":       "my-http-server-id",
		"ABC":                  "abc",
		"snake_case":           "snake-case",
		"SCREAMING_SNAKE_CASE": "screaming-snake-case",
		"a.b/c\td":             "a-b-c-d",
		"a -_./\t- b":          "a-b",
		"--Lead and trail__":   "lead-and-trail",
		"-_ ./\t":              "",
		"order2Pay":            "order2-pay",
		"order2pay":            "order2pay",
		"order_2_pay":          "order-2-pay",
		"SHA256Sum":            "sha256-sum",
		"HTTP2Server":          "http2-server",
		"2FA":                  "2-fa",
		"2fa":                  "2fa",
		"Payé":                 "payé",
		"ÉtéA":                 "Étéa",
		"a:B":                  "a:b",
		"\xffA":                "\xffa",
	} {
		if got := mesh.Kebab(in); got != want {
			t.Errorf("Kebab(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestKeyTokenFormsAreDisjoint(t *testing.T) {
	for in, want := range map[string]string{
		"":                           "_",
		"a":                          "YQ",
		"mall:order:pay:ORDER-100@x": "bWFsbDpvcmRlcjpwYXk6T1JERVItMTAwQHg",
		"\xff\xff\xff":               "____",
		strings.Repeat("k", 129):     "h9094034fb2d0ce2e407c9b260f2806ab2efb352e200722fd6296d9cf1cf7e6f5",
	} {
		if got := mesh.KeyToken(in); got != want {
			t.Errorf("KeyToken(%q) = %q, want %q", in, got, want)
		}
	}
	seen := map[string]int{}
	for n := range 400 {
		tok := mesh.KeyToken(strings.Repeat("k", n))
		if first, dup := seen[tok]; dup {
			t.Errorf("%d and %d bytes have the same token %s", first, n, tok)
		}
		seen[tok] = n
		if isShort := 1 <= n && n <= 128; isShort == (len(tok)%4 == 1) || len(tok) > 171 {
			t.Errorf("%d bytes: token of length %d", n, len(tok))
		}
	}
	// The 48 bytes whose base64 is a long string's bare hex digest.
	long := strings.Repeat("k", 129)
	sum := sha256.Sum256([]byte(long))
	short, err := base64.RawURLEncoding.DecodeString(hex.EncodeToString(sum[:]))
	if err != nil || mesh.KeyToken(string(short)) == mesh.KeyToken(long) {
		t.Errorf("%q, %v: has the token of a longer string", short, err)
	}
}

func FuzzKebab(f *testing.F) {
	for _, s := range []string{"", "Open Platform", "myHTTPServer2Go", "2FA", "--a__B", "Payé", "\xff\x00:A", "aB-Cd"} {
		f.Add(s)
	}
	legal := regexp.MustCompile(`^([a-z0-9]+(-[a-z0-9]+)*)?$`)
	separators := strings.NewReplacer(" ", "", "\t", "", "_", "", "-", "", ".", "", "/", "")
	lower := func(s string) string { // ASCII only, byte by byte
		b := []byte(s)
		for i, c := range b {
			if 'A' <= c && c <= 'Z' {
				b[i] = c + 32
			}
		}
		return string(b)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got := mesh.Kebab(s)
		if again := mesh.Kebab(got); again != got {
			t.Errorf("Kebab(%q) = %q, again %q", s, got, again)
		}
		if kept, want := strings.ReplaceAll(got, "-", ""), lower(separators.Replace(s)); kept != want {
			t.Errorf("Kebab(%q) = %q: lost or changed a character", s, got)
		}
		_, err := mesh.NewScopedKey("a", "b", s, "d")
		if isLegal := legal.MatchString(got) && got != ""; len(got) < 100 && isLegal != (err == nil) {
			t.Errorf("Kebab(%q) = %q, as an action: %v", s, got, err)
		}
	})
}

func FuzzScopedKey(f *testing.F) {
	f.Add("Open Platform", "Package Order", "Pay", "PO-100")
	f.Add("open-platform", "package-order", "pay", "PO-100")
	f.Add("a", "b", "c", key128[:122])
	f.Add("a", "b", "c", "d:e")
	f.Add("", "é", "\x00", "\xff")
	f.Fuzz(func(t *testing.T, consumer, resource, action, businessID string) {
		given := strings.Join([]string{consumer, resource, action, businessID}, ":")
		parsed, parseErr := mesh.ParseScopedKey(given)
		if parseErr != nil {
			checkKeyError(t, parseErr)
		} else if parsed.String() != given {
			t.Errorf("ParseScopedKey(%q).String() = %q", given, parsed)
		}
		built, err := mesh.NewScopedKey(consumer, resource, action, businessID)
		if err != nil {
			checkKeyError(t, err)
			if parseErr == nil {
				t.Errorf("%q parses but does not build: %v", given, err)
			}
			return
		}
		if back, err := mesh.ParseScopedKey(built.String()); err != nil || back != built {
			t.Errorf("ParseScopedKey(%q) = %#v, %v, want %#v", built, back, err, built)
		}
		if err := mesh.ValidateKey(built.String()); err != nil {
			t.Errorf("built an illegal key: %v", err)
		}
		if built.BusinessID != businessID {
			t.Errorf("businessId %q became %q", businessID, built.BusinessID)
		}
		if (parseErr == nil) != (built.String() == given) {
			t.Errorf("%q builds %q, parses with %v", given, built, parseErr)
		}
	})
}

func FuzzKeyToken(f *testing.F) {
	long := strings.Repeat("k", 129)
	sum := sha256.Sum256([]byte(long))
	f.Add("", "_")
	f.Add("a", "A")
	f.Add(long, long+"k")
	f.Add(long, string(sum[:]))
	f.Add(long, mesh.KeyToken(long))
	f.Add("\xff\xfe", "\x00")
	token := regexp.MustCompile(`^[A-Za-z0-9_-]{1,171}$`)
	f.Fuzz(func(t *testing.T, a, b string) {
		ta, tb := mesh.KeyToken(a), mesh.KeyToken(b)
		if !token.MatchString(ta) || !token.MatchString(tb) {
			t.Errorf("KeyToken(%q) = %q, KeyToken(%q) = %q: not tokens", a, ta, b, tb)
		}
		if (a == b) != (ta == tb) {
			t.Errorf("KeyToken(%q) = %q, KeyToken(%q) = %q", a, ta, b, tb)
		}
	})
}

func wantKeyError(t *testing.T, err error, key, part, message string) {
	t.Helper()
	var ke *mesh.KeyError
	if !errors.As(err, &ke) {
		t.Fatalf("%q: error %v, want a *KeyError", key, err)
	}
	if ke.Key != key || ke.Part != part || err.Error() != message {
		t.Errorf("key %q part %s\n got %v\nwant %s (key %q part %s)", ke.Key, ke.Part, err, message, key, part)
	}
}

func checkKeyError(t *testing.T, err error) {
	t.Helper()
	var ke *mesh.KeyError
	if !errors.As(err, &ke) {
		t.Fatalf("error %v, want a *KeyError", err)
	}
	if !slices.Contains([]string{"key", "consumer", "resource", "action", "businessId"}, ke.Part) {
		t.Errorf("part %q has no name", ke.Part)
	}
	msg := err.Error()
	if len(msg) > 3000 || strings.ContainsFunc(msg, func(r rune) bool { return !strconv.IsPrint(r) }) {
		t.Errorf("message is long or not printable: %d bytes, %+q", len(msg), msg)
	}
}
