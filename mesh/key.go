package mesh

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"strings"
	"unicode/utf8"
)

const (
	maxKeyLen = 128

	// Legal beside ASCII letters and digits; the separators before conversion.
	businessIDSymbols = "._@/-"
	keySymbols        = businessIDSymbols + ":"
	kebabSeparators   = " _-./\t"
)

var scopedKeyParts = [4]struct{ name, symbols string }{
	{"consumer", kebabSeparators}, {"resource", kebabSeparators}, {"action", kebabSeparators},
	{"businessId", businessIDSymbols},
}

// KeyError tells why a string is no idempotency key.
type KeyError struct {
	Key    string // as given; of untrusted length and content
	Part   string // "key" (the whole), "consumer", "resource", "action" or "businessId"
	Reason string // continues a sentence that begins with the part: "is empty"
}

// Error is one printable line whatever the key holds; a long key is cut.
func (e *KeyError) Error() string {
	part := ": part " + e.Part
	if e.Part == "key" {
		part = ""
	}
	return fmt.Sprintf("mesh: idempotency key %s%s %s", quoteKey(e.Key), part, e.Reason)
}

// ValidateKey reports, as a *[KeyError], whether key is not a plain idempotency key:
// 1 to 128 characters, each an ASCII letter, a digit or one of . _ @ : / -
// Keys that differ only in case are different keys.
func ValidateKey(key string) error {
	reason := badKeyChar(key, keySymbols)
	switch {
	case key == "":
		reason = "is empty"
	case reason == "" && len(key) > maxKeyLen:
		reason = fmt.Sprintf("is %d characters long, allowed are %d", len(key), maxKeyLen)
	}
	if reason != "" {
		return &KeyError{Key: key, Part: "key", Reason: reason}
	}
	return nil
}

// NormalizeKey returns s without surrounding white space (as Unicode has it) if that
// is a valid key, see [ValidateKey].
func NormalizeKey(s string) (string, error) {
	key := strings.TrimSpace(s)
	if err := ValidateKey(key); err != nil {
		return "", err
	}
	return key, nil
}

// ScopedKey is the idempotency key consumer:resource:action:businessId. [NewScopedKey]
// and [ParseScopedKey] return only canonical ones; a literal is not checked.
type ScopedKey struct {
	Consumer, Resource, Action string // kebab-case
	BusinessID                 string // case kept, holds no ':'
}

// NewScopedKey builds the key of a business action: the first three parts go through
// [Kebab], businessID stays as it is. A part that is empty, or holds a character that
// Kebab would have to drop, is a *[KeyError] naming the part; a key of more than 128
// characters is one naming "key".
func NewScopedKey(consumer, resource, action, businessID string) (ScopedKey, error) {
	return scopedKey([]string{consumer, resource, action, businessID}, false)
}

// ParseScopedKey is the inverse of [ScopedKey.String]; errors are as of [NewScopedKey].
// It accepts the canonical form only: converting here would let two spellings of one
// stored key pass for equal.
func ParseScopedKey(s string) (ScopedKey, error) {
	if n := strings.Count(s, ":") + 1; n != 4 {
		return ScopedKey{}, &KeyError{s, "key", fmt.Sprintf(
			"has %d part(s), wanted are the 4 of consumer:resource:action:businessId", n)}
	}
	return scopedKey(strings.Split(s, ":"), true)
}

// String returns the key as it is stored and sent.
func (k ScopedKey) String() string {
	return k.Consumer + ":" + k.Resource + ":" + k.Action + ":" + k.BusinessID
}

func scopedKey(parts []string, canonical bool) (ScopedKey, error) {
	given := strings.Join(parts, ":")
	for i, part := range parts {
		kebab, reason := part, badKeyChar(part, scopedKeyParts[i].symbols)
		if i < 3 { // the businessId "-" is legal
			kebab = Kebab(part)
		}
		switch {
		case part == "":
			reason = "is empty"
		case reason == "" && kebab == "":
			reason = "has no letter or digit"
		case reason == "" && canonical && part != kebab:
			reason = "is not in kebab-case, that is " + quoteKey(kebab)
		}
		if reason != "" {
			return ScopedKey{}, &KeyError{given, scopedKeyParts[i].name, reason}
		}
		parts[i] = kebab
	}
	k := ScopedKey{parts[0], parts[1], parts[2], parts[3]}
	if err := ValidateKey(k.String()); err != nil {
		return ScopedKey{}, err
	}
	return k, nil
}

// Kebab returns s in kebab-case: words in lower case, joined by single '-'.
// Words end at space, tab and _ - . / (runs count once, at the ends not at all), before
// an upper-case letter that follows a lower-case one or a digit, and before the last
// upper-case letter of a run that a lower-case one follows. A digit belongs to the word
// before it: HTTPServer is http-server, order2Pay is order2-pay, 2FA is 2-fa.
//
// Only ASCII is converted. Every other byte is kept, so that no two names become one by
// loss; [NewScopedKey] refuses such names. Kebab is idempotent.
func Kebab(s string) string {
	in := func(c, lo, hi byte) bool { return lo <= c && c <= hi }
	var b strings.Builder
	boundary := false
	for i, c := range []byte(s) {
		prev := s[max(i-1, 0)] // for the first byte itself: harmless, nothing precedes it
		if strings.IndexByte(kebabSeparators, c) >= 0 {
			boundary = true
			continue
		}
		if in(c, 'A', 'Z') {
			boundary = boundary || in(prev, 'a', 'z') || in(prev, '0', '9') ||
				in(prev, 'A', 'Z') && i+1 < len(s) && in(s[i+1], 'a', 'z')
			c += 'a' - 'A'
		}
		if boundary && b.Len() > 0 {
			b.WriteByte('-')
		}
		boundary = false
		b.WriteByte(c)
	}
	return b.String()
}

// KeyToken encodes any string as one token of 1 to 171 characters A-Z a-z 0-9 _ -, good
// as a KV key or a subject token. Different strings have different tokens (above 128
// bytes as surely as SHA-256 has no collisions); two may differ by case alone.
//
//	1 to 128 bytes   unpadded base64url, whose length is never 1 modulo 4
//	longer           "h" and the SHA-256 in hex: length 65, which is 1 modulo 4
//	empty            "_": length 1
//
// Tokens are stored in buckets and subjects: another encoding orphans what is there.
func KeyToken(key string) string {
	switch {
	case key == "":
		return "_"
	case len(key) > 128: // on its own: a stored token must not follow maxKeyLen
		return fmt.Sprintf("h%x", sha256.Sum256([]byte(key)))
	}
	return base64.RawURLEncoding.EncodeToString([]byte(key))
}

// badKeyChar names the first character of s beside ASCII letters, digits and symbols.
// With its code point, since a Cyrillic letter printed alone looks right.
func badKeyChar(s, symbols string) string {
	for i, r := range s {
		if 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' ||
			r < utf8.RuneSelf && strings.IndexByte(symbols, byte(r)) >= 0 {
			continue
		}
		what := fmt.Sprintf("%#U", r)
		if _, size := utf8.DecodeRuneInString(s[i:]); r == utf8.RuneError && size == 1 {
			what = fmt.Sprintf("byte 0x%02x, which is not UTF-8", s[i])
		}
		return fmt.Sprintf("holds %s; allowed are ASCII letters, digits and any of %q", what, symbols)
	}
	return ""
}

func quoteKey(s string) string {
	if utf8.RuneCountInString(s) > maxKeyLen {
		return fmt.Sprintf("%.*q…", maxKeyLen, s)
	}
	return fmt.Sprintf("%q", s)
}
