package pgtest

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// admin creates and drops databases over one connection.
type admin struct {
	server url.URL
	conn   *pgx.Conn
	prefix string // of this process's databases
	made   int
	how    string // the cheaper way to copy on this server
}

func newAdmin(server string) (*admin, error) {
	u, err := url.Parse(server)
	if err != nil || (u.Scheme != "postgres" && u.Scheme != "postgresql") {
		return nil, fmt.Errorf("%s is not a postgres:// URL", urlVariable)
	}
	a := &admin{server: *u, prefix: "jetmesh_test_" + strings.ToLower(rand.Text()[:8])}
	// Copying files beats writing the copy to the log, unless each file is synced.
	// The choice exists since PostgreSQL 15.
	const copies = `select case when current_setting('server_version_num')::int >= 150000
		and current_setting('fsync')::bool = false then ' strategy file_copy' else '' end`
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if a.conn, err = pgx.Connect(ctx, server); err != nil {
		return nil, err
	}
	if err := a.conn.QueryRow(ctx, copies).Scan(&a.how); err != nil {
		_ = a.conn.Close(ctx)
		return nil, err
	}
	return a, nil
}

func (a *admin) close() error { return a.conn.Close(context.Background()) }

// url is the address of a database on the server.
func (a *admin) url(database string) string {
	u := a.server
	u.Path = "/" + database
	return u.String()
}

// create makes a database from another and returns its name.
func (a *admin) create(from string) (string, error) {
	a.made++
	name := fmt.Sprintf("%s_%d", a.prefix, a.made)
	return name, a.exec("create database " + name + " template " + from + a.how)
}

// drop removes a database and cuts off who is connected. Removing it twice is fine.
func (a *admin) drop(name string) error {
	return a.exec("drop database if exists " + name + " with (force)")
}

// seal makes a database ready for being copied: nobody is connected any more. The
// server itself would look for that only every 100 ms.
func (a *admin) seal(name string) error {
	if err := a.exec("alter database " + name + " allow_connections false"); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	for {
		var left int
		err := a.conn.QueryRow(ctx, `select count(pg_terminate_backend(pid))
			from pg_stat_activity where datname = $1`, name).Scan(&left)
		if err != nil {
			return fmt.Errorf("end the connections of %s: %w", name, err)
		}
		if left == 0 {
			return nil
		}
		time.Sleep(time.Millisecond)
	}
}

func (a *admin) exec(sql string) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if _, err := a.conn.Exec(ctx, sql); err != nil {
		return fmt.Errorf("%s: %w", sql, err)
	}
	return nil
}
