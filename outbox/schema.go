package outbox

import (
	"fmt"
	"regexp"
	"strings"
)

// A Schema is the Postgres schema that holds an outbox. Its methods are the package's
// functions for a schema other than [DefaultSchema].
type Schema string

// DefaultSchema is the schema of the package-level functions.
const DefaultSchema Schema = "mesh"

var schemaName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,47}$`)

// check keeps the name safe to stand in SQL and in a notification channel's name.
func (s Schema) check() error {
	if !schemaName.MatchString(string(s)) || strings.HasPrefix(string(s), "pg_") {
		return fmt.Errorf("outbox: schema must be 1 to 48 of a-z 0-9 _, begin with no digit and not with pg_; it is %.80q", string(s))
	}
	return nil
}

// sql writes the schema's name into a statement.
func (s Schema) sql(statement string) string {
	return strings.ReplaceAll(statement, "{{schema}}", `"`+string(s)+`"`)
}

// channel is the notification channel on which a sleeping relay listens.
func (s Schema) channel() string { return string(s) + "_outbox" }
