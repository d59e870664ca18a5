-- A small shop: what the example's analyst is asked about.
CREATE TABLE customers (
  id INTEGER PRIMARY KEY,
  name TEXT NOT NULL,
  region TEXT NOT NULL
);
CREATE TABLE orders (
  id INTEGER PRIMARY KEY,
  customer_id INTEGER NOT NULL REFERENCES customers (id),
  product TEXT NOT NULL,
  amount REAL NOT NULL,
  ordered_on TEXT NOT NULL
);
INSERT INTO customers VALUES
  (1, 'Alder', 'north'), (2, 'Birch', 'north'), (3, 'Cedar', 'south'), (4, 'Dogwood', 'west'), (5, 'Elm', 'south');
INSERT INTO orders VALUES
  (1, 1, 'lamp', 40.0, '2026-01-04'), (2, 1, 'chair', 120.0, '2026-01-19'), (3, 2, 'desk', 310.0, '2026-02-02'),
  (4, 3, 'lamp', 40.0, '2026-02-11'), (5, 3, 'shelf', 85.0, '2026-02-27'), (6, 4, 'desk', 310.0, '2026-03-03'),
  (7, 5, 'chair', 120.0, '2026-03-08'), (8, 5, 'chair', 120.0, '2026-03-15'), (9, 2, 'lamp', 40.0, '2026-03-21');
