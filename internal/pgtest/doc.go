// Package pgtest gives tests real PostgreSQL databases, each its own.
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
//
//	func TestSomething(t *testing.T) {
//		t.Parallel()
//		pool := pgtest.Pool(t, migrations.Up) // a fresh copy of a migrated database
//
// A server starts when the first test asks for a database, and one such server
// serves the whole test binary. It forgets everything at the end, so it runs without
// fsync; a test about durability asks for [Server].
//
// With JETMESH_TEST_DATABASE_URL (a postgres:// URL of a user who may create
// databases) the databases are made on that server instead.
package pgtest
